"""The findings of a recording, which for a large one are looked for once and kept beside it."""

from contextlib import suppress

import msgspec

from stepscope.explain.trace.profile import Profile, code_digest
from stepscope.files import decode, read_plain, write_atomically
from stepscope.findings import Finding


def find_once(profile: Profile) -> tuple[Finding, ...]:
    """The largest saving first. The rules are imported where they are needed: a second look does without them."""
    path = profile.kept_in / f"findings-{code_digest()}.json" if profile.kept_in else None
    if path is not None:
        with suppress(OSError, msgspec.DecodeError):  # not there yet, or damaged: looked for below
            return decode(read_plain(path), tuple[Finding, ...])
    from stepscope.explain.rules import find

    found = find(profile)
    if path is not None:
        with suppress(OSError):  # a full disk costs the next look some time, and nothing else
            write_atomically(path, msgspec.json.encode(found))
    return found
