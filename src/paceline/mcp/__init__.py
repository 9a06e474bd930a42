"""Paceline's answers for an assistant, over the Model Context Protocol."""
