"""The command line: one thin file per verb. A verb parses, calls `api` or `jobs` and hands the result to `render`."""
