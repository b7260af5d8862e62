#!/bin/sh
# Make the cluster key at $1 if there is none: readable by its owner alone, and
# never half written. Starting a deployment again keeps the key it has.
set -eu
key=$1
[ ! -s "$key" ] || { echo "cluster key: already at $key"; exit 0; }
umask 077
pagerelay keygen >"$key.new"
[ -s "$key.new" ] || { echo "cluster key: keygen wrote nothing" >&2; exit 1; }
mv "$key.new" "$key"
echo "cluster key: made $key"
