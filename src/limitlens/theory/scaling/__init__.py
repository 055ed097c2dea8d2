"""Scaling limits of attention from one query over n keys on a sphere: averaging, selection or collapse onto one key."""
