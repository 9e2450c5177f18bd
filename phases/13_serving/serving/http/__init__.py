"""HTTP: requests and responses as ASGI messages, and the fields of JSON bodies."""
