"""The red team of `recover` and `verify`: forged evidence and false claims. The command is bench/attacks.py."""
