"""Scaling limits of attention from one query over keys on a sphere: averaging, selection and collapse."""
