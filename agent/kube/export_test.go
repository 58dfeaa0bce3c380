package kube

import (
	"context"
	"time"
)

// DiscoverEvery has it asked more often which kinds of the Gateway API the
// cluster has. Call it before Run.
func (c *Cluster) DiscoverEvery(d time.Duration) { c.routes.every = d }

// DecodeGateway is what the decoder of custom resources makes of an answer:
// the number of objects.
func DecodeGateway(data []byte) (objects, unreadable int, err error) {
	o, _, err := decodeGateway(data)
	var all []*gatewayObject
	switch o := o.(type) {
	case *gatewayObject:
		all = append(all, o)
	case *gatewayList:
		all = o.Items
	}
	for _, o := range all {
		if o.is.Err != nil {
			unreadable++
		}
	}
	return len(all), unreadable, err
}

// ErrNotOwnPod is errNotOwnPod.
var ErrNotOwnPod = errNotOwnPod

// Announce makes the pod have the annotation, once.
func (a *Announcer) Announce(ctx context.Context) error { return a.announce(ctx) }

// SeenRight tells whether the watch has shown the annotation as it should be.
func (a *Announcer) SeenRight() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.seen
}

// Words counts the regions that the store has been told of.
func (s *Store) Words() int { return len(s.regions) }
