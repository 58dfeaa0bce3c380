package collect

import (
	"context"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Place says whose pods of an owner this agent may ask.
type Place uint8

const (
	// Elsewhere: another agent is in charge. It is the zero value.
	Elsewhere Place = iota
	// OwnNode: this agent is, and asks pods of its node.
	OwnNode
	// AnyNode: nobody is, and somebody here waits.
	AnyNode
)

// Placement says which agent collects an owner, and brings what others did.
// Place and Want must not wait, and must not call the collector.
type Placement interface {
	// Place is asked again whenever the owner changes, or [Collector.Consider]
	// is called.
	Place(o *nodecache.Owner) Place
	// Want says that a caller needs to know what the owner serves.
	Want(key nodecache.OwnerKey)
	// Wait returns when something is known of an owner that is collected
	// elsewhere, or when an attempt to learn it has failed. Its error is that
	// of ctx.
	Wait(ctx context.Context, key nodecache.OwnerKey) error
}
