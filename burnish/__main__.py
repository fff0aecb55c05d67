"""``python -m burnish`` is the command ``burnish``."""

from burnish.cli import main

if __name__ == "__main__":
    main()
