"""The rows that measuring verbs save for each case, and the results files that contain them."""
