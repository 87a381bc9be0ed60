"""Decoding with and without speculation, measured from the client's side and compared.

`run` sends prompts and records each request, `compare` sets two records side by side, `sweep` does
the first at several k, `importing` reads other people's measurements. What is measured is kept raw,
requests and counters alike, and every figure is derived when somebody looks.
"""
