"""Adapters beside the linears of a model that stays as it is."""
