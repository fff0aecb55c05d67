"""Single responses with scores or a class."""
