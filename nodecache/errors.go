package nodecache

import "errors"

var (
	// ErrStale indicates that a reservation's generation has ended: the
	// owner's last pod was removed, or the owner was created again, after the
	// reservation was made. What was collected for it must be thrown away.
	ErrStale = errors.New("reservation is stale")

	// ErrBusy indicates that the owner is being collected already.
	ErrBusy = errors.New("owner is being collected")

	// ErrChanged indicates that what a revision was made from is not what is
	// known of the owner any more.
	ErrChanged = errors.New("what is known of the owner has changed")

	// ErrOlder indicates that what is known of an owner is as new as what
	// another agent says of it, or newer.
	ErrOlder = errors.New("what is known of the owner is not older")

	// ErrNotHosted indicates that an agent speaks of an owner of which no pod
	// that may be asked stands on its node.
	ErrNotHosted = errors.New("no pod of the owner stands on the node")

	// ErrOldRoute indicates that the directory holds a newer generation of the
	// same route.
	ErrOldRoute = errors.New("route is older than the one held")

	// ErrClosed indicates that a subscription was closed.
	ErrClosed = errors.New("subscription is closed")
)
