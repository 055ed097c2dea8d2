"""Display of results: HTML page, terminal, notebook, and figures for print."""
