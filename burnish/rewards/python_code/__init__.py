"""Code in a sandbox: ``tests.py`` reads code and tests, ``judge.py`` runs them."""
