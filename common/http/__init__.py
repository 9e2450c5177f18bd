"""Errors over HTTP, and limits on what a client may send: of several phases."""
