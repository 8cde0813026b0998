#!/bin/sh
# Installs a browser for the page tests, if we are root on a Debian-like system. Without one, they are skipped.
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
fi
echo 'Chromium not installed: the page tests are skipped (as root: apt-get install chromium)' >&2
