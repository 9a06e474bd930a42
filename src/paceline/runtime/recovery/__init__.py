"""How a worker goes from one generation to the next: what it keeps, what a rank's state is checked
against, and where a lost one is brought back from."""
