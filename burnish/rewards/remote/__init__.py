"""Rewards of HTTP servers: ``reward.py`` builds requests, ``client.py`` sends them."""
