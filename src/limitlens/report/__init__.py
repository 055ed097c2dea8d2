"""Views of results and their renderers: HTML page, terminal, notebook, and figures for print."""
