"""What several dialects share: reading fields, tools, turns and sampling; putting answers together. Knows no dialect's routes."""
