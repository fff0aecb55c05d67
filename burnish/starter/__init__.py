"""The command ``burnish init``: a folder with a recipe that runs. Start with ``jobs.py``; then
``folder.py`` and ``questions.py``. ``files`` has the templates."""
