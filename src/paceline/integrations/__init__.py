"""What a training script of your own imports: `paceline.log`, and callbacks that call it.

Nothing here needs torch, a launcher or Paceline's runtime. `transformers` and `lightning` import
the library that they are for.
"""
