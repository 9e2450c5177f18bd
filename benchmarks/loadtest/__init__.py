"""A load tool: many users, from several processes, and what they had to wait for."""
