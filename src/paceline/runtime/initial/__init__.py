"""A model built without its numbers, and the numbers that each rank then draws of it.

`blueprint` records what a person's factory does, `program` does it again for the parts that a rank
has, `fill` puts those into the split model.
"""
