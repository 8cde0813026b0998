"""The command line: one thin file a verb. A verb parses, calls the library and hands the result to `report`."""
