"""Compare evidence, kernel by kernel, with a few layers of the claimed model that ran on the verifier's own GPU."""
