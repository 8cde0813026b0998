"""What somebody claims of a model, and whether a run bears it out: `stepscope verify`."""
