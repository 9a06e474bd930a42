"""Reads training programs and configurations, and says what will go wrong."""
