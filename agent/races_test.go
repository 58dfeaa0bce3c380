package agent_test

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// races is how often each race is run, atOnce how many of them at a time.
const (
	races  = 1000
	atOnce = 100
)

// run runs a race on a wired agent many times, each with an owner of its own.
// The agent's parts are the real ones, from the API server's events to what a
// client of the socket is told.
func run(t *testing.T, race func(w *wired, n int) error) {
	w := newWired(t)
	w.run()
	var services []string
	for n := range races {
		services = append(services, serviceOf(n))
	}
	w.ready(true)
	w.follow(services...)
	var running sync.WaitGroup
	defer running.Wait()
	room := make(chan struct{}, atOnce)
	for n := range races {
		room <- struct{}{}
		if t.Failed() {
			return
		}
		running.Go(func() {
			if err := race(w, n); err != nil {
				t.Errorf("race %d: %v", n, err)
			}
			<-room
		})
	}
}

// together calls the functions at the same moment, as near as can be, and
// waits for all.
func together(fs ...func()) {
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for _, f := range fs {
		wg.Go(func() { <-begin; f() })
	}
	close(begin)
	wg.Wait()
}

// members makes the pods of a race, and their addresses.
func (w *wired) members(n, count int) (pods []*corev1.Pod, addrs []string) {
	for i := range count {
		pods = append(pods, w.pod(n, i))
		addrs = append(addrs, podIP(n, i))
	}
	return pods, addrs
}

// arrive lets pods appear at the same moment.
func (w *wired) arrive(pods ...*corev1.Pod) {
	var fs []func()
	for _, p := range pods {
		fs = append(fs, func() { w.api.put(p) })
	}
	together(fs...)
}

// once is an error if the race's pods were dialled more often than once.
func (w *wired) once(n int) error {
	if got := w.pods.dials(n); got != 1 {
		return fmt.Errorf("%d dials, want 1", got)
	}
	return nil
}

func first(steps ...func() error) error {
	for _, s := range steps {
		if err := s(); err != nil {
			return err
		}
	}
	return nil
}

// Each subtest has the name of the race that it stands for.
func TestRacesOnTheWiredAgent(t *testing.T) {
	// All pods of an owner come at once: one is asked.
	t.Run("RedundantCollect", func(t *testing.T) {
		run(t, func(w *wired, n int) error {
			pods, addrs := w.members(n, 10)
			w.arrive(pods...)
			return first(
				func() error { return w.toldOf(serviceOf(n), addrs...) },
				func() error { return w.once(n) },
			)
		})
	})

	// The pods that are asked fail while all others have come: these do not fail
	// after them.
	t.Run("CollectFailureAmplification", func(t *testing.T) {
		run(t, func(w *wired, n int) error {
			pods, addrs := w.members(n, 10)
			release := w.pods.hold(n)
			defer release()
			w.pods.refuse(n, 3) // as many as one attempt asks
			w.arrive(pods...)
			if err := first(
				func() error { return w.pods.asked(n) },
				func() error { return w.holds(ownerOf(n), len(pods)) },
				func() error { return w.once(n) },
			); err != nil {
				return err
			}
			release()
			if err := w.toldOf(serviceOf(n), addrs...); err != nil {
				return err
			}
			if got := w.pods.dials(n); got != 4 {
				return fmt.Errorf("%d dials, want three that fail and one", got)
			}
			return nil
		})
	})

	// Pods come while the first is asked, and as it answers.
	t.Run("SubscriberNotification", func(t *testing.T) {
		run(t, func(w *wired, n int) error {
			pods, addrs := w.members(n, 4)
			release := w.pods.hold(n)
			defer release()
			w.arrive(pods[:2]...)
			if err := first(func() error { return w.pods.asked(n) }, func() error { return w.holds(ownerOf(n), 2) }); err != nil {
				return err
			}
			together(release, func() { w.arrive(pods[2:]...) })
			return first(
				func() error { return w.toldOf(serviceOf(n), addrs...) },
				func() error { return w.once(n) },
			)
		})
	})

	// What readers were given does not change under them. The race detector
	// watches.
	t.Run("RaceDetector", func(t *testing.T) {
		run(t, func(w *wired, n int) error {
			pods, addrs := w.members(n, 3)
			svc, slice := w.front(n, pods...)
			stop := make(chan struct{})
			read := make(chan error, 1)
			go func() { read <- w.read(n, stop) }()
			together(
				func() { w.arrive(pods...) },
				func() { w.api.put(svc); w.api.put(slice) },
			)
			w.api.remove(pods[0])
			err := w.toldOf(serviceOf(n), addrs[1:]...)
			close(stop)
			return first(func() error { return <-read }, func() error { return err })
		})
	})

	// Two routes of one owner come while its last pod goes and another comes.
	t.Run("HTTPRoute_TOCTOU", func(t *testing.T) {
		run(t, func(w *wired, n int) error {
			pods, addrs := w.members(n, 2)
			svc, slice := w.front(n, pods[0])
			w.api.put(svc)
			w.api.put(slice)
			w.api.put(pods[0])
			if err := w.toldOf(serviceOf(n), addrs[0]); err != nil {
				return err
			}
			route := func(name string) func() {
				return func() {
					_ = w.dir.UpsertRoute(&nodecache.Route{
						UID: fmt.Sprint(name, n), Generation: 1, Namespace: "prod", Name: fmt.Sprint(name, n),
						Rules: []nodecache.RouteRule{{
							Matches:  []nodecache.RouteMatch{{Verb: "GET", Path: "/" + name}},
							Backends: []nodecache.RouteBackend{{Service: nodecache.Name{Namespace: "prod", Name: svc.Name}, Weight: 1}},
						}},
					})
				}
			}
			_, both := w.front(n, pods...)
			together(route("a"), route("b"), func() { w.api.remove(pods[0]) }, func() { w.api.put(pods[1]) }, func() { w.api.put(both) })
			if err := w.toldOf(serviceOf(n), addrs[1]); err != nil {
				return err
			}
			routed := func() bool {
				var paths []string
				for _, e := range w.dir.Owner(ownerOf(n)).Routes {
					paths = append(paths, e.Path)
				}
				slices.Sort(paths)
				return slices.Equal(paths, []string{"/a", "/b"})
			}
			if err := w.until(routed); err != nil {
				return fmt.Errorf("routes %+v: %w", w.dir.Owner(ownerOf(n)).Routes, err)
			}
			return w.once(n)
		})
	})

	// The last old pod goes as the first new one comes, known or being asked.
	t.Run("AddRemove", func(t *testing.T) {
		run(t, func(w *wired, n int) error {
			pods, addrs := w.members(n, 2)
			asked := n%2 == 0
			release := w.pods.hold(n)
			defer release()
			w.api.put(pods[0])
			if err := w.pods.asked(n); err != nil {
				return err
			}
			if !asked {
				release()
				if err := w.toldOf(serviceOf(n), addrs[0]); err != nil {
					return err
				}
			}
			together(release, func() { w.api.remove(pods[0]) }, func() { w.api.put(pods[1]) })
			if err := w.toldOf(serviceOf(n), addrs[1]); err != nil {
				return err
			}
			// A generation that ended is asked again; no other is.
			if got := w.pods.dials(n); got > 2 || got > 1 && !asked {
				return fmt.Errorf("%d dials", got)
			}
			return nil
		})
	})

	// The watches of pods and of Services bring one owner at once.
	t.Run("WithPodWatcher", func(t *testing.T) {
		run(t, func(w *wired, n int) error {
			pods, addrs := w.members(n, 3)
			if n%2 == 0 {
				// That it may be asked is said by the Service alone.
				for _, p := range pods {
					p.Spec.Containers[0].Ports[0].Name = "api"
				}
			}
			svc, slice := w.front(n, pods...)
			together(
				func() { w.arrive(pods...) },
				func() { w.api.put(svc) },
				func() { w.api.put(slice) },
			)
			if err := first(func() error { return w.toldOf(serviceOf(n), addrs...) }, func() error { return w.once(n) }); err != nil {
				return err
			}
			behind := func() bool {
				for _, m := range w.dir.Owner(ownerOf(n)).Pods {
					if len(m.Behind) != 1 {
						return false
					}
				}
				return true
			}
			return w.until(behind)
		})
	})
}

// The last of the rows: readiness waits for each owner of the first list once,
// not for each of its pods.
func TestInitBlocking(t *testing.T) {
	const starts, owners, replicas = 10, 100, 3
	for n := range starts {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			w := newWired(t)
			var services []string
			for n := range owners {
				services = append(services, serviceOf(n))
				for i := range replicas {
					w.api.put(w.pod(n, i))
				}
			}
			release := w.pods.hold(n)
			defer release()
			w.run()
			if err := w.pods.asked(n); err != nil {
				t.Fatal(err)
			}
			eventually(t, func() error {
				st, err := w.status()
				if err == nil && (st.Owners["known"] != owners-1 || st.Owners["collecting"] != 1 || st.Pods != owners*replicas) {
					err = fmt.Errorf("status %+v", st)
				}
				return err
			})
			w.ready(false)
			release()
			w.ready(true)
			w.follow(services...)
			for n := range owners {
				_, addrs := w.members(n, replicas)
				if err := first(func() error { return w.toldOf(serviceOf(n), addrs...) }, func() error { return w.once(n) }); err != nil {
					t.Fatalf("owner %d: %v", n, err)
				}
			}
		})
	}
}

// read takes views of a race's owner until stop is closed, and looks whether
// they stay what they were.
func (w *wired) read(n int, stop <-chan struct{}) error {
	type seen struct {
		o    *nodecache.Owner
		text string
	}
	var views []seen
	for {
		select {
		case <-stop:
			for _, v := range views {
				if now := fmt.Sprintf("%+v", *v.o); now != v.text {
					return fmt.Errorf("a view was %s, is %s", v.text, now)
				}
			}
			return nil
		default:
		}
		if o := w.dir.Owner(ownerOf(n)); o != nil && len(views) < 100 {
			views = append(views, seen{o, fmt.Sprintf("%+v", *o)})
		}
		runtime.Gosched()
	}
}
