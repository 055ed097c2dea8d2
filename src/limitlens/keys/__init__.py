"""Choices of keys, one small file each: which of its keys a head keeps."""
