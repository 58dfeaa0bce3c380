#!/bin/bash
# Fails if formatting, go.mod or generated code would change.
set -euo pipefail
cd "$(dirname "$0")/.."
fail=0

unformatted=$(git ls-files -z --cached --others --exclude-standard '*.go' | xargs -0r ls -d 2>/dev/null | xargs -r gofmt -l)
if [ -n "$unformatted" ]; then
	printf 'not formatted, run gofmt -w:\n%s\n' "$unformatted" >&2
	fail=1
fi

if ! go mod tidy -diff; then
	echo "go.mod or go.sum is not tidy, run go mod tidy" >&2
	fail=1
fi

# Works in a tree with changes of one's own as well: only the difference that
# go generate makes counts.
state() { git status --porcelain --untracked-files=all; git diff; }
before=$(state)
go generate ./...
if [ "$before" != "$(state)" ]; then
	git status --short >&2
	echo "generated files are not up to date, run go generate ./... and commit" >&2
	fail=1
fi
exit $fail
