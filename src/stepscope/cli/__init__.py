"""The command line, one thin module per verb. A verb parses its options, calls `api` or `jobs`, and passes the result
to `render`."""
