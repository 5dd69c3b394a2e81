"""States decide: may this happen now, and which status follows?

No await, clock, network or logging in here.
"""
