"""The jobs of recipes: each module builds the loop of one job. ``run.py`` runs a job."""
