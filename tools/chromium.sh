#!/bin/sh
# A browser for the tests of pages: from the distribution where this machine lets us, and otherwise they are left out and
# say so.
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
fi
echo 'no chromium: the tests of pages are left out (as root: apt-get install chromium)' >&2
