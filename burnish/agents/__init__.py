"""Agents: a server that answers the HTTP APIs of model clients, and the programs that call it.

Reading order: calls (requests and replies in terms of no API).
"""
