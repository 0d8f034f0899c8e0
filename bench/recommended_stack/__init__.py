"""``python -m bench.recommended_stack``: what each ingredient of examples/recommended_stack.py buys on slow links."""
