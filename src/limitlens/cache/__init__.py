"""KV-cache compression: budgets and key policies per head (`plan`), and their effect on a live model (`trial`)."""
