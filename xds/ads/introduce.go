package ads

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/xds"
)

// introduce keeps the node of the first request and asks for its scopes.
func (st *stream) introduce(node *corev3.Node) error {
	st.mu.Lock()
	known := st.node != nil
	st.mu.Unlock()
	if known {
		return nil
	}
	if node == nil {
		node = &corev3.Node{}
	}
	if err := checkNode(node); err != nil {
		return err
	}
	id := node.GetId()
	who, err := st.identify(st.ctx)
	if err != nil {
		return err
	}
	node = proved(node, &who)
	key := who.key(id)
	if err := st.s.enter(st, key, node.GetId()); err != nil {
		return err
	}
	view, err := st.s.opts.View(Introduction{Node: node, Delta: st.delta, Proved: who.Pod != ""})
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if st.s.opts.Joined != nil {
		st.s.opts.Joined(node, who)
	}
	sees := st.s.see(&view)
	st.s.told(&who, id)
	st.mu.Lock()
	st.node, st.id, st.who, st.key = kept(node), id, who, key
	st.sight, st.demand, st.dialer, st.closed, st.warns = sees, view.Demand, view.Dialer, view.Closed, view.Warnings
	if st.demand != nil {
		st.wanted = view.Wanted
	}
	over := st.over
	st.mu.Unlock()
	if over && view.Closed != nil {
		view.Closed()
	}
	if over && view.Dialer != nil {
		view.Dialer.Close()
	}
	return nil
}

// admit returns the type of a request, as served does, and keeps the node of
// the first one.
func (st *stream) admit(url string, node *corev3.Node) (xds.Type, bool, error) {
	t, ok, err := st.served(url)
	if err == nil {
		err = st.introduce(node)
	}
	return t, ok, err
}

// served returns the type of a request; false for a type that is not served,
// which is left unanswered.
func (st *stream) served(url string) (xds.Type, bool, error) {
	if st.only != aggregated {
		if url != "" && url != st.only.URL() {
			return 0, false, status.Errorf(codes.InvalidArgument, "type_url %q on a stream of %s", url, st.only.URL())
		}
		return st.only, true, nil
	}
	if url == "" {
		return 0, false, status.Error(codes.InvalidArgument, "type_url is required on an aggregated stream")
	}
	t, ok := xds.TypeOf(url)
	return t, ok, nil
}
