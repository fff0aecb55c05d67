"""Agents: a server that answers the HTTP APIs of model clients, and the programs that call it.

Reading order: calls (requests and replies in terms of no API), openai_chat, openai_responses and
anthropic_messages (the APIs), reading (validated access to JSON bodies), conversation (messages and
tools of a request), writing (parts of replies).
"""
