"""Training without lockstep: what a parameter server costs, and whom a slow worker delays."""
