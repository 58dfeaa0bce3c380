package report

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// election is one agent's part in the election by a Lease. A holder renews it
// three times in its duration, and counts as elected for two thirds of it after
// the last time; the others look once in a duration, and take it when they have
// seen no renewal for as long. No clock is compared with another machine's. It
// belongs to one goroutine.
type election struct {
	leases          rest.Interface
	namespace, name string
	identity        string
	duration        time.Duration // whole seconds

	seen   string    // the resourceVersion that was looked at last
	seenAt time.Time // when it was seen first
}

// attempt looks at the Lease, and takes or renews it if it can. It returns who
// holds it then.
func (e *election) attempt(ctx context.Context) (holder string, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.duration/6)
	defer cancel()
	for range 2 {
		holder, err = e.once(ctx)
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			break
		}
		// Another was quicker: look who.
	}
	if err != nil {
		return "", fmt.Errorf("lease %s/%s: %w", e.namespace, e.name, err)
	}
	return holder, nil
}

func (e *election) once(ctx context.Context) (string, error) {
	lease := &coordinationv1.Lease{}
	err := e.leases.Get().Namespace(e.namespace).Resource("leases").Name(e.name).Do(ctx).Into(lease)
	now := time.Now()
	switch {
	case apierrors.IsNotFound(err):
		lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: e.name}}
		e.take(&lease.Spec, now)
		err = e.leases.Post().Namespace(e.namespace).Resource("leases").Body(lease).Do(ctx).Error()
		return e.identity, err
	case err != nil:
		return "", err
	}
	if lease.ResourceVersion != e.seen {
		e.seen, e.seenAt = lease.ResourceVersion, now
	}
	spec, holder := &lease.Spec, ""
	if spec.HolderIdentity != nil {
		holder = *spec.HolderIdentity
	}
	lasts := e.duration
	if spec.LeaseDurationSeconds != nil {
		lasts = time.Duration(*spec.LeaseDurationSeconds) * time.Second
	}
	switch {
	case holder == e.identity:
		spec.RenewTime = &metav1.MicroTime{Time: now}
	case holder == "" || now.Sub(e.seenAt) >= lasts:
		e.take(spec, now)
	default:
		return holder, nil
	}
	return e.identity, e.update(ctx, lease)
}

func (e *election) take(spec *coordinationv1.LeaseSpec, now time.Time) {
	seconds, transitions := int32(e.duration/time.Second), int32(0)
	if spec.LeaseTransitions != nil {
		transitions = *spec.LeaseTransitions + 1
	}
	at := &metav1.MicroTime{Time: now}
	*spec = coordinationv1.LeaseSpec{
		HolderIdentity: &e.identity, LeaseDurationSeconds: &seconds, AcquireTime: at, RenewTime: at, LeaseTransitions: &transitions,
	}
}

// update needs the version of the lease that was read: the API server refuses it
// where somebody else was quicker.
func (e *election) update(ctx context.Context, lease *coordinationv1.Lease) error {
	return e.leases.Put().Namespace(e.namespace).Resource("leases").Name(e.name).Body(lease).Do(ctx).Error()
}

// release lets another take the Lease at once, if it is this one's.
func (e *election) release(ctx context.Context) error {
	lease := &coordinationv1.Lease{}
	if err := e.leases.Get().Namespace(e.namespace).Resource("leases").Name(e.name).Do(ctx).Into(lease); err != nil {
		return err
	}
	if h := lease.Spec.HolderIdentity; h == nil || *h != e.identity {
		return errors.New("held by another")
	}
	nobody := ""
	lease.Spec.HolderIdentity = &nobody
	return e.update(ctx, lease)
}

// jittered is d, a fifth more or less: agents that start together must not ask
// together for ever.
func jittered(d time.Duration) time.Duration {
	return d + time.Duration((rand.Float64()-0.5)*0.4*float64(d))
}
