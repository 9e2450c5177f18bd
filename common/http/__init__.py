"""What several phases say over HTTP: errors, and limits on what a client may send."""
