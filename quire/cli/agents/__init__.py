"""Coding agents as `quire launch` starts them: the settings of each one (known.py), and the server they talk to (background.py)."""
