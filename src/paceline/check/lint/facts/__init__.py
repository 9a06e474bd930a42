"""The facts engine: what a program does, read and not run. It knows no rule."""
