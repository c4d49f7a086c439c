"""The runner whose state lives on a torch device: what a step sends there, the sizes that are captured, and what comes back."""
