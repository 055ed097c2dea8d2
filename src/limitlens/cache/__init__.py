"""KV-cache compression: how many and which keys each head keeps (`plan`), and how predictions change (`trial`)."""
