package nodecache

import "net/netip"

// An address behind a Service without a selector is nobody's pod, and is never
// asked what it serves. Where the Service declares that, the addresses in its
// slices are the places of an owner by the Service's UID: each has a stand-in
// that is a pod in everything but name. (An ExternalName Service has one, for its
// DNS name; see Directory.seatHost.) A stand-in claims no address, since what stands
// in a slice that somebody wrote may be any address, a pod's as well.

// seat needs mu. It gives the addresses of the slice their stand-ins, as the
// Service says; a nil one, or one that declares nothing, gives none.
func (d *Directory) seat(rec *sliceRecord, f *Front) {
	want := map[string]*Pod{}
	if f != nil && !f.Selects && len(f.Declared) > 0 {
		for _, e := range rec.slice.Endpoints {
			for _, a := range e.Addrs {
				if p := standIn(f, rec.slice, e, a); p != nil {
					want[p.UID] = p
				}
			}
		}
	}
	for uid := range rec.seats {
		if want[uid] == nil {
			d.removePod(uid, nil)
		}
	}
	rec.seats = nil
	for uid, p := range want {
		d.upsertPod(p, d.pods[uid])
		if rec.seats == nil {
			rec.seats = make(map[string]struct{}, len(want))
		}
		rec.seats[uid] = struct{}{}
	}
}

// seatHost needs mu. It gives the name of an ExternalName Service that declares
// what is served there the one stand-in by it; nobody else stands behind one.
func (d *Directory) seatHost(rec *frontRecord, f *Front, moved moves) {
	was := rec.host
	rec.host = nil
	serves := f != nil && f.External != "" && len(f.Declared) > 0
	if was != nil && (!serves || f.UID != was.UID) {
		d.removePod(hostUID(was.Front), nil)
		d.fronts.move(hostUID(was.Front), was, nil, moved)
		was = nil
	}
	if !serves {
		return
	}
	p := seated(f, hostUID(f), f.External)
	p.Host, p.State, p.Declared = f.External, Serving, f.Declared
	rec.host = &Standing{Front: f}
	for _, decl := range f.Declared {
		rec.host.Ports = append(rec.host.Ports, decl.Port)
	}
	d.upsertPod(p, d.pods[p.UID])
	d.fronts.move(p.UID, was, rec.host, moved)
}

func hostUID(f *Front) string { return f.UID + "/host" }

// seated is a stand-in at a place of the Service.
func seated(f *Front, uid, at string) *Pod {
	return &Pod{
		Common: &Common{
			Namespace: f.Namespace, Owner: OwnerKey{UID: f.UID}, OwnerName: "Service/" + f.Name,
			Workload: Workload{Namespace: f.Namespace, Kind: "Service", Name: f.Name}, Export: f.Export, Locality: f.Locality, Policy: f.Policy,
		},
		UID: uid, Name: f.Name + "@" + at, Created: f.Created, HostNetwork: true,
	}
}

func seatUID(f *Front, s *Slice, a netip.Addr) string {
	return f.UID + "/" + s.Name + "/" + a.String()
}

// standIn is nil for an address that gets no calls.
func standIn(f *Front, s *Slice, e Endpoint, a netip.Addr) *Pod {
	p := seated(f, seatUID(f, s, a), a.String())
	p.Addr, p.Zone = a, e.Zone
	switch {
	case e.Ready:
		p.State = Serving
	case e.Serving && e.Terminating:
		p.State = Draining
	default:
		return nil
	}
	for _, decl := range f.Declared {
		if decl.Port == 0 {
			if s.AnyPort || len(s.Ports) != 1 {
				continue
			}
			decl.Port = s.Ports[0].Port
		}
		p.Declared = append(p.Declared, decl)
	}
	if len(p.Declared) == 0 {
		return nil
	}
	return p
}

// places are the UIDs of what the endpoint holds: its pod, or the stand-ins of
// its addresses.
func (r *sliceRecord) places(e Endpoint) []string {
	if e.Pod != "" {
		return []string{e.Pod}
	}
	var uids []string
	for _, a := range e.Addrs {
		uid := seatUID(r.standing.Front, r.slice, a)
		if _, seated := r.seats[uid]; seated {
			uids = append(uids, uid)
		}
	}
	return uids
}
