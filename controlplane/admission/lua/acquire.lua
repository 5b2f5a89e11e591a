-- Take every charge of a request or none: {id, holder, ttl, charges {counter, amount, hard, window...}}.
local id, holder, ttl, charges = unpack(request)
tidy()
local record = read_record(id)
if record then
  if record[STATE] == SETTLED then return answer('ended', 'settled') end
  if record[HOLDER] ~= holder then return answer('ended', 'fenced') end
  if record[EXPIRES] <= now then return answer('ended', 'expired') end
  return answer('granted', epoch, now, 1, record[FENCE], record[TAKEN], record[EXPIRES], (judge(charges)))
end
local standings, places, refusals, cold, inside = judge(charges)
local refused = obstacle(standings, refusals, cold, inside)
if refused then return refused end
record = {LIVE, now + ttl, new_fence(), now, 0, holder, {}}
take(charges, standings, places, id, record)
write_live(id, record)
return answer('granted', epoch, now, 0, record[FENCE], now, record[EXPIRES], standings)
