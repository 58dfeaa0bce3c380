package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/fingerpost/fingerpost/nodecache"
)

// maxUpstreams bounds what one pod declares: it is in its sidecar's memory
// whether or not it is called.
const maxUpstreams = 64

// upstreams reads what the pod says that it calls. What cannot be understood
// takes nothing from the rest.
func (t *template) upstreams(a annotation) []nodecache.Upstream {
	if !a.there {
		return nil
	}
	return parseUpstreams(a.value, func(entry string, why error) { t.note(UpstreamsAnnotation, entry, "%v", why) })
}

// parseUpstreams reads a list of calls as programs write them, and tells bad what
// in it is none:
//
//	pkg.Service              calls that name nothing but the gRPC service
//	/pkg.service             the same, whatever letters it has
//	users.prod:50051         calls to the Service, of all that is served there
//	users.prod:50051/pkg.S   of one gRPC service
//
// Namespace and port may be wanting, as where a call is made: DNS and the
// Service then say. Of an entry without a slash and a port capital letters and
// underscores tell that it is a gRPC service, since DNS has none.
func parseUpstreams(value string, bad func(entry string, why error)) (ups []nodecache.Upstream) {
	for entry := range strings.SplitSeq(value, ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		u, err := parseUpstream(entry)
		switch {
		case err != nil:
			bad(entry, err)
		case slices.Contains(ups, u):
		case len(ups) == maxUpstreams:
			bad(value, fmt.Errorf("only its first %d entries count", maxUpstreams))
			return ups
		default:
			ups = append(ups, u)
		}
	}
	return ups
}

func parseUpstream(entry string) (nodecache.Upstream, error) {
	authority, service, slash := strings.Cut(entry, "/")
	if !slash && strings.ContainsFunc(entry, func(r rune) bool { return r == '_' || 'A' <= r && r <= 'Z' }) && !strings.Contains(entry, ":") {
		authority, service, slash = "", entry, true
	}
	if slash && (!validService(service) || len(service) > 255) {
		return nodecache.Upstream{}, errors.New("it has no full name of a gRPC service")
	}
	if authority == "" {
		if nodecache.Infrastructure(service) {
			return nodecache.Upstream{}, fmt.Errorf("it is served by a Service's name alone: write SERVICE.NAMESPACE:PORT/%s", service)
		}
		return nodecache.Upstream{Service: service}, nil
	}
	authority, err := parseAuthority(authority)
	if err != nil {
		return nodecache.Upstream{}, err
	}
	return nodecache.Upstream{Authority: authority, Service: service}, nil
}

var dnsName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$`)

// parseAuthority returns an authority as the names of clusters have it.
func parseAuthority(text string) (string, error) {
	host, port, found := text, "", false
	if i := strings.LastIndexByte(text, ':'); i >= 0 && !strings.HasSuffix(text, "]") {
		host, port, found = text[:i], text[i+1:], true
	}
	if found {
		if _, err := parsePort(port); err != nil {
			return "", err
		}
		port = ":" + port
	}
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	switch addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")); {
	case host == "localhost" || err == nil && addr.IsLoopback():
		return "", fmt.Errorf("%s is the sidecar itself: leave it out, and name the gRPC service alone", host)
	case err == nil && addr.Is4() == !strings.HasPrefix(host, "["):
	case len(host) > 253 || !dnsName.MatchString(host):
		return "", errors.New("it is no name of a Service")
	}
	return host + port, nil
}
