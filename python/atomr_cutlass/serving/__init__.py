"""Requests served from a mailbox: the actor, its messages, and a fresh process after a lost context."""
